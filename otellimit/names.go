package otellimit

// The names of the metrics and their attributes. They follow ASP.NET Core's
// (aspnetcore.rate_limiting.*), the only convention there is; units are UCUM's. Prometheus writes
// underscores for dots, and _total at the end of a counter.
const (
	scope = "github.com/pgratelimit/ratelimit/otellimit"

	// MetricRequests counts the calls of limits, by policy, result, verb and form: a call for two
	// limits counts once for each. Calls of form tx count when they are decided, even if the
	// caller's transaction rolls back later. {request}
	MetricRequests = "ratelimit.requests"

	// MetricTokens counts the tokens taken, by policy, in a caller's transaction when it is
	// decided. MetricTokensReturned counts those given back. {token}
	MetricTokens         = "ratelimit.tokens"
	MetricTokensReturned = "ratelimit.tokens.returned"

	// MetricPermits counts the permits acquired, by policy and weight, and MetricPermitsReleased
	// those released. Leases that end by themselves are not counted. {permit}
	MetricPermits         = "ratelimit.permits"
	MetricPermitsReleased = "ratelimit.permits.released"

	// MetricDuration is the time that decisions took, by policy, result, verb and form. A call for
	// several limits counts once, for the limit that decides. Decisions from memory, for which no
	// clock is read, are left out. s
	MetricDuration = "ratelimit.request.duration"

	// MetricQueued is the part of MetricDuration that a call waited in its process, by policy and
	// form. s
	MetricQueued = "ratelimit.request.time_in_queue"

	// MetricWait is the wait that callers were told, by policy and result: a refusal's RetryAfter,
	// or the time until a reservation is due. s
	MetricWait = "ratelimit.wait"

	// MetricBatch is the number of calls that shared a statement. {request}
	MetricBatch = "ratelimit.batch.size"

	// MetricRetries counts the statements and transactions that ran again because PostgreSQL asked
	// for it, by policy. {retry}
	MetricRetries = "ratelimit.transaction.retries"

	// MetricErrors counts calls that ended with an error, by policy, verb and error.type. {error}
	MetricErrors = "ratelimit.errors"

	// MetricDoor counts the requests and jobs that middlewares decided, by door, result, passed and
	// shadow. {request}
	MetricDoor = "ratelimit.door.requests"

	// MetricHeld is the number of tokens that a process holds in memory by Config.Escrow, by
	// policy. {token}
	MetricHeld = "ratelimit.escrow.held"

	// MetricCatalogAge is the time since a process last read the catalog. s
	MetricCatalogAge = "ratelimit.catalog.age"

	// MetricSilent is 1 while a fallback.Store knows that its database is silent, and otherwise 0.
	// MetricSilences counts the silences, and MetricBusy the calls that found all connections of
	// the pool in use. {silence}, {request}
	MetricSilent   = "ratelimit.fallback.silent"
	MetricSilences = "ratelimit.fallback.silences"
	MetricBusy     = "ratelimit.fallback.pool_in_use"

	// MetricDead is the number of old row versions in the database. MetricSnapshot is the number of
	// transactions that have begun since the oldest snapshot, which keeps them. {version},
	// {transaction}
	MetricDead     = "ratelimit.versions.dead"
	MetricSnapshot = "ratelimit.snapshot.age"

	// MetricParked is the number of River's jobs that wait in line for permits, by policy, and
	// MetricParkedAge how long the first of them has waited. {job}, s
	MetricParked    = "ratelimit.parked.jobs"
	MetricParkedAge = "ratelimit.parked.age"

	AttrPolicy = "ratelimit.policy" // the name of the limit
	AttrResult = "ratelimit.result" // a ratelimit.Outcome
	AttrVerb   = "ratelimit.verb"
	AttrForm   = "ratelimit.form"
	AttrDoor   = "ratelimit.door"
	AttrPassed = "ratelimit.passed"
	AttrShadow = "ratelimit.shadow"
	AttrError  = "error.type"    // ratelimit.Event.ErrorClass
	AttrKey    = "ratelimit.key" // in spans only, if Config.Keys is set
)

// seconds are the bounds of histograms of time, from a lone decision in memory to the longest wait
// for one.
var seconds = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

// waits are the bounds of MetricWait, which reaches from seconds to periods.
var waits = []float64{.01, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}

// sizes are the bounds of MetricBatch, up to the most calls of a statement.
var sizes = []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
