"""What every measurement shares: arms that take turns, intervals, pages, and the systems that are measured."""
