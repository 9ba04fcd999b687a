"""The report of a sweep or a run, from the files that its runs have left: a table, curves, and a verdict in words."""
