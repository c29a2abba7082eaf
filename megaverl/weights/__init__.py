"""Moving weights as a plan says: local copies, point to point, files."""
