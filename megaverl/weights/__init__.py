"""Move weights between ranks, formats and files: reshard, export, load, and check that both sides are equal."""
