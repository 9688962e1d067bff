"""The methods that a sharded module offers."""
