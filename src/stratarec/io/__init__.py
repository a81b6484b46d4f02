"""Files that are whole or absent, directories of ours, and who may work in one."""
