package riverlimit

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/parked"
)

// LineFullError is the refusal of jobs that would make a line longer than [Inserter.MaxParked]. It is
// [ratelimit.ErrRefused].
type LineFullError struct {
	Limit string // the name of the limit for whose permits they would wait
	Most  int
}

func (e *LineFullError) Error() string {
	return fmt.Sprintf("riverlimit: limit %q: more than %d jobs of a key would be parked", e.Limit, e.Most)
}

// Unwrap makes errors.Is(err, ratelimit.ErrRefused) true.
func (e *LineFullError) Unwrap() error { return ratelimit.ErrRefused }

// insert inserts jobs, and parks those that cannot start.
func (in Inserter) insert(ctx context.Context, tx pgx.Tx, jobs []river.InsertManyParams) ([]*rivertype.JobInsertResult, error) {
	if in.InFlight == nil || len(jobs) == 0 {
		return in.Client.InsertManyTx(ctx, tx, jobs)
	}
	jobs = slices.Clone(jobs)
	places, lines, err := in.parkings(ctx, tx, jobs)
	if err != nil {
		return nil, err
	}
	results, err := in.Client.InsertManyTx(ctx, tx, jobs)
	if err != nil {
		return nil, err
	}
	var put []*parking
	skipped := false
	for i, p := range places {
		skipped = skipped || results[i].UniqueSkippedAsDuplicate
		if p != nil && !results[i].UniqueSkippedAsDuplicate {
			p.priority, p.job = results[i].Job.Priority, results[i].Job.ID
			if p.place != nil {
				p.place = &results[i].Job.CreatedAt
			}
			put = append(put, p)
		}
	}
	if len(put) > 0 {
		err = park(ctx, tx, in.Store.Schema(), put)
	}
	if err == nil && skipped {
		err = in.wakeBehind(ctx, tx, put, lines)
	}
	return results, err
}

// wakeBehind wakes jobs that were parked behind others which River has then skipped as duplicates.
func (in Inserter) wakeBehind(ctx context.Context, tx pgx.Tx, put []*parking, lines map[lineID]*newLine) error {
	var calls []*call
	asked := make(map[lineID]bool)
	for _, p := range put {
		if l := lines[p.line].limit; !asked[p.line] {
			asked[p.line] = true
			calls = append(calls, &call{line: p.line, limit: l.Limit, lease: l.LeaseOrDefault()})
		}
	}
	return wake(ctx, tx, in.Store, calls)
}

// parkings returns the places of jobs in lines, nil for a job that may start, and the lines. It
// schedules a job with a place for later, when it comes by itself: the first of a line after a
// lease, the others after parkedFor.
func (in Inserter) parkings(ctx context.Context, tx pgx.Tx, jobs []river.InsertManyParams) ([]*parking, map[lineID]*newLine, error) {
	asked := make([]ratelimit.PermitRequest, len(jobs))
	lines := make(map[lineID]*newLine)
	for i := range jobs {
		row, err := rowOf(&jobs[i])
		if err != nil {
			return nil, nil, err
		}
		if row.ScheduledAt.After(time.Now()) {
			continue
		}
		asked[i] = permitsOf(in.Catalog, in.InFlight, row)
		if asked[i].Limit.Name == "" {
			continue
		}
		if err := asked[i].Validate(); err != nil {
			return nil, nil, err
		}
		for _, p := range asked[i].Parts() {
			lines[idOf(in.Client, p.Limit.Name, p.Key)] = &newLine{limit: p.Limit, free: p.Limit.Limit}
		}
	}
	if err := in.readLines(ctx, tx, lines); err != nil {
		return nil, nil, err
	}
	places := make([]*parking, len(jobs))
	for i, a := range asked {
		if a.Limit.Name == "" {
			continue
		}
		part, line := in.refuses(lines, &a)
		if part == nil {
			continue
		}
		wait := parkedFor
		if line.jobs == 0 {
			wait = part.Limit.LeaseOrDefault()
		}
		if line.jobs++; in.MaxParked > 0 && line.jobs > in.MaxParked {
			return nil, nil, &LineFullError{Limit: part.Limit.Name, Most: in.MaxParked}
		}
		id := idOf(in.Client, part.Limit.Name, part.Key)
		places[i] = &parking{line: id, weight: part.N}
		if id == idOf(in.Client, a.Limit.Name, a.Key) {
			places[i].place = new(time.Time) // the job's, once it is inserted
		}
		var err error
		if jobs[i].InsertOpts, err = parkedOpts(jobs[i].InsertOpts, time.Now().Add(wait)); err != nil {
			return nil, nil, err
		}
	}
	return places, lines, nil
}

// newLine is a line while jobs are inserted.
type newLine struct {
	limit ratelimit.InFlight
	jobs  int // that are parked, up to one more than MaxParked
	free  int // permits that no earlier job of the call has taken
}

// refuses returns the part of a request that a job has to wait for, and its line. It returns nil if
// the job may start, and counts its permits as taken.
func (in Inserter) refuses(lines map[lineID]*newLine, asked *ratelimit.PermitRequest) (*ratelimit.PermitRequest, *newLine) {
	parts := asked.Parts()
	for i, p := range parts {
		line := lines[idOf(in.Client, p.Limit.Name, p.Key)]
		if (line.jobs > 0 || line.free < p.N) && p.Limit.Mode != ratelimit.ModeRefuse {
			return &parts[i], line
		}
	}
	for _, p := range parts {
		lines[idOf(in.Client, p.Limit.Name, p.Key)].free -= p.N
	}
	return nil, nil
}

// linesSQL returns how many jobs are in lines, and locks the last job of each until the transaction
// ends. So it cannot be woken before. A process that wakes jobs looks again, and finds those parked
// behind it. If all jobs are being woken, the line counts as empty.
const linesSQL = `WITH lines AS MATERIALIZED (
	SELECT * FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS l (name, key, i)
), last AS MATERIALIZED (
	SELECT l.i FROM lines AS l CROSS JOIN LATERAL (
		SELECT FROM PARKED AS p WHERE p.river = $1 AND p.name = l.name AND p.key = l.key
		ORDER BY p.priority DESC, p.place DESC, p.job DESC LIMIT 1 FOR KEY SHARE SKIP LOCKED) AS p
)
SELECT CASE WHEN EXISTS (SELECT FROM last WHERE last.i = l.i) THEN (SELECT count(*)::int4 FROM (
	SELECT FROM PARKED AS p WHERE p.river = $1 AND p.name = l.name AND p.key = l.key LIMIT $4::int4) AS counted) ELSE 0 END
FROM lines AS l ORDER BY l.i`

// readLines reads how many jobs are in lines.
func (in Inserter) readLines(ctx context.Context, tx pgx.Tx, lines map[lineID]*newLine) error {
	if len(lines) == 0 {
		return nil
	}
	ids := slices.Collect(maps.Keys(lines))
	rows, _ := tx.Query(ctx, strings.ReplaceAll(linesSQL, "PARKED", parked.In(in.Store.Schema())), in.Client.Schema(),
		column(ids, func(id lineID) string { return id.name }), column(ids, func(id lineID) string { return id.key }), in.MaxParked+1)
	jobs, err := pgx.CollectRows(rows, pgx.RowTo[int])
	for i, n := range jobs {
		lines[ids[i]].jobs = n
	}
	return parkedFault("read the lines of jobs", err)
}

// rowOf returns the row that River will insert for a job, as far as it is known before that.
func rowOf(p *river.InsertManyParams) (*rivertype.JobRow, error) {
	if p.Args == nil {
		return nil, invalid("Args", nil, "must not be nil")
	}
	args, err := json.Marshal(p.Args)
	if err != nil {
		return nil, fmt.Errorf("riverlimit: the job's arguments: %w", err)
	}
	given, own := optsOf(p.InsertOpts), ownOpts(p.Args)
	row := &rivertype.JobRow{
		Kind: p.Args.Kind(), EncodedArgs: args, Metadata: given.Metadata, Tags: given.Tags, State: rivertype.JobStateAvailable,
		Queue:       cmp.Or(given.Queue, own.Queue, river.QueueDefault),
		Priority:    cmp.Or(given.Priority, own.Priority, river.PriorityDefault),
		MaxAttempts: cmp.Or(given.MaxAttempts, own.MaxAttempts, river.MaxAttemptsDefault),
		ScheduledAt: cmp.Or(given.ScheduledAt, own.ScheduledAt),
	}
	if len(row.Tags) == 0 {
		row.Tags = own.Tags
	}
	return row, nil
}

// optsOf returns a copy of options, which may be nil.
func optsOf(opts *river.InsertOpts) (o river.InsertOpts) {
	if opts != nil {
		o = *opts
	}
	return o
}

// ownOpts returns the options that a job's arguments have.
func ownOpts(args river.JobArgs) (o river.InsertOpts) {
	if with, ok := args.(river.JobArgsWithInsertOpts); ok {
		o = with.InsertOpts()
	}
	return o
}

// parkedOpts returns the options of a job that is parked until an instant.
func parkedOpts(opts *river.InsertOpts, until time.Time) (*river.InsertOpts, error) {
	o := optsOf(opts)
	o.ScheduledAt = until
	n, _ := storedNote(&rivertype.JobRow{Metadata: o.Metadata}) // that of its reservation, if there is one
	n.Attempt, n.Parked = 1, true
	var err error
	o.Metadata, err = n.addTo(o.Metadata)
	return &o, err
}
