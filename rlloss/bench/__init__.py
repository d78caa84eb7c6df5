"""`rlloss bench`: time, memory and accuracy of the modes and of the peers that are installed, in one table."""
