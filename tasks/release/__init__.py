"""Seven packages, released one by one: versions, changelogs, interfaces, archives, neighbours."""
