"""Per-token numbers to per-token numbers: ratios, clips, KL estimators, advantages.

Legend used in all docstrings: B rows, T tokens of a row, N tokens that count, S sequences, H hidden size, V vocabulary.
Log-probs and KL are in nats. Nothing here divides by a number of tokens: denominators are computed once, in
`rlloss.losses.calibration`.
"""
