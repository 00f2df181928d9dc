"""What the router measures and what its workers tell, at one scrape address."""
