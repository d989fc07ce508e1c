"""What two or more roles share: the ground floor (no torch) and the engine floor (`engine`, `serving`)."""
