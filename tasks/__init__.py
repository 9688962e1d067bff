"""The tasks behind `python3 noxfile.py -s NAME`, one concept per file or folder."""
