"""What models are made from: configurations, roles, initialisation, mesh axes."""
