package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/edge"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// An Unlike is a key of another shape than the keys by which a limit is called, such as an address
// where those are networks. An override or pause of it affects no call.
type Unlike struct {
	Key    string
	Shape  string   // see [edge.Shape]
	Shapes []string // the shape of the limit's rows
	Row    string   // one of the limit's keys
	Write  string   // the key in their shape; "" if unknown
}

// String returns the fact in a sentence.
func (u *Unlike) String() string {
	text := fmt.Sprintf("rows of the limit have keys such as %s (%s), and this is another shape (%s)", visible.Text(u.Row), strings.Join(u.Shapes, ", "), u.Shape)
	if u.Write != "" {
		text += ": write " + visible.Text(u.Write)
	}
	return text
}

// MostUnlike is the largest number of keys whose neighbours [Inspector.Unlike] reads.
const MostUnlike = 1000

// Rows of a limit that no pause has written: the first and last ones, and those beside a key, where
// keys of its shape stand.
const (
	atEnds = `(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.paused IS NULL ORDER BY r.key LIMIT 100)
UNION ALL
(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.paused IS NULL ORDER BY r.key DESC LIMIT 100)`

	around = `(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.key >= $2::text AND r.paused IS NULL ORDER BY r.key LIMIT 20)
UNION ALL
(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.key < $2::text AND r.paused IS NULL ORDER BY r.key DESC LIMIT 20)`
)

// Unlike returns the keys of another shape than the limit's rows, looking at the first [MostUnlike]
// keys. Without rows that tell it returns none.
func (d *Inspector) Unlike(ctx context.Context, name string, keys ...string) (unlike []Unlike, err error) {
	keys = keys[:min(len(keys), MostUnlike)]
	called := map[string]bool{}
	shapes, beside := map[string]bool{}, map[string][]string{} // "" is for limits without keys
	var batch pgx.Batch
	queue := func(key, sql string, args ...any) {
		batch.Queue(strings.ReplaceAll(sql, "rate_limits AS", d.Table()+" AS"), args...).Query(func(rows pgx.Rows) error {
			var row string
			_, err := pgx.ForEachRow(rows, []any{&row}, func() error {
				called[row], shapes[edge.Shape(row)] = true, true
				beside[key] = append(beside[key], row)
				return nil
			})
			return err
		})
	}
	queue("", atEnds, name)
	for _, key := range keys {
		queue(key, around, name, key)
	}
	if err := d.Pool.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	for _, key := range keys {
		if len(shapes) > 0 && !called[key] && !edge.Alike(key, shapes) {
			unlike = append(unlike, unlikeOf(key, shapes, slices.Concat(beside[key], beside[""])))
		}
	}
	return unlike, nil
}

// unlikeOf compares a key with rows, and returns how to write it.
func unlikeOf(key string, shapes map[string]bool, rows []string) Unlike {
	u := Unlike{Key: key, Shape: edge.Shape(key), Shapes: slices.Sorted(maps.Keys(shapes)), Row: rows[0]}
	for _, row := range rows {
		if like, ok := edge.Like(key, row); ok {
			u.Row, u.Write = row, like
			break
		}
	}
	return u
}

// UnlikeOverrides returns the overrides of a limit, and its present pauses, whose keys are
// [Unlike].
func (d *Inspector) UnlikeOverrides(ctx context.Context, name string) (overrides, pauses []Unlike, err error) {
	var keys []string
	for _, e := range d.Catalog.Overrides(name) {
		if e.Key != catalog.AllKeys && e.Switch != catalog.Off {
			keys = append(keys, e.Key)
		}
	}
	if overrides, err = d.Unlike(ctx, name, keys...); err != nil {
		return nil, nil, err
	}
	rows, _ := d.Pool.Query(ctx, "SELECT DISTINCT r.key FROM "+d.Table()+" AS r WHERE r.name = $1::text AND r.paused > clock_timestamp() LIMIT $2::int8", name, MostUnlike)
	if keys, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, nil, fmt.Errorf("read pauses: %w", err)
	}
	pauses, err = d.Unlike(ctx, name, keys...)
	return overrides, pauses, err
}
