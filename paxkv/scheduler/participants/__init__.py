"""What takes part in scheduling besides the two queues."""
