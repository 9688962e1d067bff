"""Pipeline stages, their schedules and the runner."""
