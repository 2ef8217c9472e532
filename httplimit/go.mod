module github.com/pgratelimit/ratelimit/httplimit

go 1.25.0

require (
	github.com/dunglas/httpsfv v1.1.2
	github.com/pgratelimit/ratelimit v0.0.0-00010101000000-000000000000
)

replace github.com/pgratelimit/ratelimit => ../
