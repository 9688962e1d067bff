"""Process groups, hosts, and the mesh of named axes over them."""
