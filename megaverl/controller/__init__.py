"""Controller: the coordinator's rank runs a program, and every rank serves its calls in the order of the program."""
