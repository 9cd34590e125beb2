"""Traffic and what becomes of it: workloads, playing them through an engine, records, figures. Imports no torch."""
