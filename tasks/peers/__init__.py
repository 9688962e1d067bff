"""torch's own tests, run on gloo over Lamina: which hold, and why others do not."""
