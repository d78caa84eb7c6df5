"""`rlloss report`: one self-contained HTML page of a run.

`data` reads the folder of a run, `charts` and `heatmap` draw SVG, `samples` shows responses, `page` puts it together.
"""
