// what      What is added to the square of the length that a query or key is divided by.
constexpr double LEAST_SQUARE = 1e-6;
