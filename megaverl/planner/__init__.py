"""What a run will need, by arithmetic alone: memory and bytes of every rank, seconds, a picture. No torch."""
