"""Pages of what stands side by side: runs, and the periods of one that goes on."""
