"""A run with unlike machines on one computer: real processes on emulated lines, and what came of it."""
