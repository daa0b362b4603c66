"""Questions to saved models: a suite is asked once, of any model that can be opened, and its answers are kept."""
