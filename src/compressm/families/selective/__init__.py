"""Cuts of selective layers, whose step, B and C the input chooses: averages over data take the place of a system."""
