"""Where every element of every weight lives: pure arithmetic on boxes, no torch, no processes."""
