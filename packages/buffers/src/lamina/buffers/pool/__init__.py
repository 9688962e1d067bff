"""Storage that units are gathered into: allocation, slots, and the guard against stale reads."""
