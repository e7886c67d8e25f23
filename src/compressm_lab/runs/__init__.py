"""Files that a run or a measurement writes and a report reads."""
