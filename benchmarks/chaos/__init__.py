"""What a user reads, and how soon a run ends, when a rank comes to harm; see README.md."""
