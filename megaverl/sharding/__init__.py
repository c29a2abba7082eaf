"""Location of every element of every weight on every rank: arithmetic on boxes, without torch or processes."""
