"""The report of a benchmark: one HTML page, and its charts as PNG files. Draws its own SVG; loads nothing."""
