"""Studies of what a cut does to trained models: each module measures one thing and writes a result file."""
