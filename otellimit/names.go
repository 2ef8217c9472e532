package otellimit

// The names of the metrics and of their attributes, near those of ASP.NET Core
// (aspnetcore.rate_limiting.*), which is the only convention there is. Units are UCUM's. In
// Prometheus dots are underscores, and a counter ends with _total.
const (
	scope = "github.com/pgratelimit/ratelimit/otellimit"

	// MetricRequests counts, by policy, result, verb and form, the calls of limits: a call for
	// two limits counts once for each. Those of form tx are counted when they are decided, also if
	// the caller's transaction is rolled back later. {request}
	MetricRequests = "ratelimit.requests"

	// MetricTokens counts the tokens that were taken, by policy; in a caller's transaction when
	// that is decided. Tokens given back are
	// MetricTokensReturned. {token}
	MetricTokens         = "ratelimit.tokens"
	MetricTokensReturned = "ratelimit.tokens.returned"

	// MetricPermits counts the permits that were acquired, by policy: as many as the work weighs. Those
	// released are MetricPermitsReleased; leases that end by themselves are not known. {permit}
	MetricPermits         = "ratelimit.permits"
	MetricPermitsReleased = "ratelimit.permits.released"

	// MetricDuration is how long decisions took, by policy, result, verb and form; of several
	// limits by the one that decides, so its count is that of calls. Those from memory, for which
	// no clock is read, are not in it. s
	MetricDuration = "ratelimit.request.duration"

	// MetricQueued is the part of that in which a call waited in its process, by policy and form. s
	MetricQueued = "ratelimit.request.time_in_queue"

	// MetricWait is the wait that was told: a refusal's RetryAfter, or until a reservation is due,
	// by policy and result. s
	MetricWait = "ratelimit.wait"

	// MetricBatch is with how many calls each call on its own shared its statement. {request}
	MetricBatch = "ratelimit.batch.size"

	// MetricRetries counts how often statements and transactions were run again for calls, since
	// PostgreSQL asked for that, by policy. {retry}
	MetricRetries = "ratelimit.transaction.retries"

	// MetricErrors counts calls that ended with an error, by policy, verb and error.type. {error}
	MetricErrors = "ratelimit.errors"

	// MetricDoor counts the requests and jobs on which middlewares have decided, by door,
	// result, passed and shadow. {request}
	MetricDoor = "ratelimit.door.requests"

	// MetricHeld is the tokens that a process holds in its memory by Config.Escrow, by policy.
	// {token}
	MetricHeld = "ratelimit.escrow.held"

	// MetricCatalogAge is since when a process has not heard of the catalog. s
	MetricCatalogAge = "ratelimit.catalog.age"

	// MetricSilent is 1 while a fallback.Store knows its database to be silent, and else 0.
	// MetricSilences counts the silences that began, and MetricBusy the calls that found all
	// connections of the pool in use. {silence}, {request}
	MetricSilent   = "ratelimit.fallback.silent"
	MetricSilences = "ratelimit.fallback.silences"
	MetricBusy     = "ratelimit.fallback.pool_in_use"

	// MetricDead is how many old versions of rows the database keeps, and MetricSnapshot how many
	// transactions have begun since the oldest snapshot that keeps them. {version}, {transaction}
	MetricDead     = "ratelimit.versions.dead"
	MetricSnapshot = "ratelimit.snapshot.age"

	AttrPolicy = "ratelimit.policy" // the name of the limit
	AttrResult = "ratelimit.result" // a ratelimit.Outcome
	AttrVerb   = "ratelimit.verb"
	AttrForm   = "ratelimit.form"
	AttrDoor   = "ratelimit.door"
	AttrPassed = "ratelimit.passed"
	AttrShadow = "ratelimit.shadow"
	AttrError  = "error.type"    // ratelimit.Event.ErrorClass
	AttrKey    = "ratelimit.key" // of spans alone, if Config.Keys asks for it
)

// seconds are the bounds of histograms of time: from the time of a lone decision in memory to the
// longest wait for one.
var seconds = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

// waits are those of MetricWait, which is as long as periods are.
var waits = []float64{.01, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}

// sizes are those of MetricBatch, up to the most that a statement decides.
var sizes = []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
