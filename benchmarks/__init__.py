"""`pd-bench`: measurements as ratios inside one run, against a peer or a floor. May import any package."""
