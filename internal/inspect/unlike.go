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

// An Unlike is a key that looks otherwise than the keys by which a limit is called, such as an address
// where those are networks: an override or a pause of it holds for no call.
type Unlike struct {
	Key    string
	Shape  string   // see [edge.Shape]
	Shapes []string // of the limit's rows
	Row    string   // one of their keys
	Write  string   // the key in their shape; "" if that cannot be told
}

// String returns the fact in a sentence.
func (u *Unlike) String() string {
	text := fmt.Sprintf("rows of the limit have keys such as %s (%s), and this is another shape (%s)", visible.Text(u.Row), strings.Join(u.Shapes, ", "), u.Shape)
	if u.Write != "" {
		text += ": write " + visible.Text(u.Write)
	}
	return text
}

// MostUnlike is of how many keys [Inspector.Unlike] looks at the neighbours.
const MostUnlike = 1000

// around reads the rows of a limit that no pause has written: the first and the last ones, and those
// beside each key, where keys of its shape stand.
const around = `SELECT '', r.key FROM (SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.paused IS NULL ORDER BY r.key LIMIT 100) AS r
UNION ALL
SELECT '', r.key FROM (SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.paused IS NULL ORDER BY r.key DESC LIMIT 100) AS r
UNION ALL
SELECT k.key, r.key FROM unnest($2::text[]) AS k (key) CROSS JOIN LATERAL (
	(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.key >= k.key COLLATE "C" AND r.paused IS NULL ORDER BY r.key LIMIT 20)
	UNION ALL
	(SELECT r.key FROM rate_limits AS r WHERE r.name = $1::text AND r.key < k.key COLLATE "C" AND r.paused IS NULL ORDER BY r.key DESC LIMIT 20)
) AS r`

// Unlike returns those of the keys, of which it looks at the first [MostUnlike], that look otherwise
// than the keys of the limit's rows. Where there is no row that tells, it returns none.
func (d *Inspector) Unlike(ctx context.Context, name string, keys ...string) (unlike []Unlike, err error) {
	keys = keys[:min(len(keys), MostUnlike)]
	rows, err := d.Pool.Query(ctx, strings.ReplaceAll(around, "rate_limits AS", d.Table()+" AS"), name, keys)
	if err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	called := map[string]bool{}
	shapes, beside := map[string]bool{}, map[string][]string{} // "" are those of no key
	var key, row string
	_, err = pgx.ForEachRow(rows, []any{&key, &row}, func() error {
		called[row], shapes[edge.Shape(row)] = true, true
		beside[key] = append(beside[key], row)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	for _, key := range keys {
		if len(shapes) > 0 && !called[key] && !edge.Alike(key, shapes) {
			unlike = append(unlike, unlikeOf(key, shapes, slices.Concat(beside[key], beside[""])))
		}
	}
	return unlike, nil
}

// unlike is Unlike of one key, nil if it is not.
func (d *Inspector) unlike(ctx context.Context, name, key string) (*Unlike, error) {
	unlike, err := d.Unlike(ctx, name, key)
	if err != nil || len(unlike) == 0 {
		return nil, err
	}
	return &unlike[0], nil
}

// unlikeOf returns a key as it differs from rows, with the row that tells how to write it.
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

// UnlikeOverrides returns those overrides of a limit, and those pauses of its keys that hold, whose
// keys are [Unlike].
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
	rows, err := d.Pool.Query(ctx, "SELECT DISTINCT r.key FROM "+d.Table()+" AS r WHERE r.name = $1::text AND r.paused > clock_timestamp() LIMIT $2::int8", name, MostUnlike)
	if err != nil {
		return nil, nil, fmt.Errorf("read pauses: %w", err)
	}
	if keys, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, nil, fmt.Errorf("read pauses: %w", err)
	}
	pauses, err = d.Unlike(ctx, name, keys...)
	return overrides, pauses, err
}
