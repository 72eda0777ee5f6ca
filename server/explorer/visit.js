// Visits: recorded to a file, and replayed without a server.
