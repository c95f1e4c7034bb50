"""The reference, inputs, models and comparisons that test modules share."""
