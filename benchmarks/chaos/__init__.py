"""What becomes of a run when a rank comes to harm; see README.md."""
