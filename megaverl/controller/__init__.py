"""The coordinator's rank runs the program; all ranks serve its calls in the order in which it makes them."""
