"""What several modules of tests share."""
