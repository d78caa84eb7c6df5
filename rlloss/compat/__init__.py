"""Other libraries' names and shapes for what rlloss does."""
