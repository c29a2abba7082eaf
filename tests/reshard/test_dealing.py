"""Who serves whom."""
