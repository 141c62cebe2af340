"""Other projects' ways of updating weights, as methods of the rig: their own code where it runs."""
