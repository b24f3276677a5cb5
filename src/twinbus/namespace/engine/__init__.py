"""What a namespace decides: events and the time in, the next state and effects out. No I/O."""
