"""Tasks with tools over one, two and three servers in memory, each with an oracle on the state that they leave."""
