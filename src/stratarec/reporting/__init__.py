"""What people look at: progress and the HTML report."""
