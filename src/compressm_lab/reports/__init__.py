"""Pictures and tables of what runs and measurements recorded; the one place that knows matplotlib."""
