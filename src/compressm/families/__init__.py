"""Families of recurrences: what the pipeline of a cut asks of a layer, and one answer for each kind of recurrence."""
