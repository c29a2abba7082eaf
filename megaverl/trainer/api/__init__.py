"""The public API for Python programs: the names that users of such systems write, each to the one implementation.

`from megaverl import ...`, `from megaverl.trainer import ...`, `from megaverl.utils import ...` lead here, and import
nothing before they are used.
"""
