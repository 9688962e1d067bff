"""What every call shares: checks, handles, the ledger, registered memory."""
