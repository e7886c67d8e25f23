"""A product with B and the recurrence it drives: its gradient comes with sums that a norm before it needs."""
