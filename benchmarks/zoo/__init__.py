"""Any model: what is planned, split and run right, what is refused and why, and is any wrong?"""
